"""Handle container images: the record inside an image, checks by it, archives, registries, and the commands."""
