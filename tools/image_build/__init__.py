"""The steps of docker/Dockerfile.cuda and docker/Dockerfile.rocm.  A step fails where the image would prove less."""
