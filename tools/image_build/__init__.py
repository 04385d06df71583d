"""The steps of docker/Dockerfile.cuda and docker/Dockerfile.rocm.

A step fails if it cannot prove that its result is the expected one.
"""
