"""The steps of docker/Dockerfile.cuda and docker/Dockerfile.rocm; each refuses what would make the image mean less."""
