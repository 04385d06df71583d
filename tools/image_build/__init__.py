"""The steps of docker/Dockerfile.cuda and docker/Dockerfile.rocm.  A step fails where a proof would be missing."""
