"""Handle container images: build, pin, check, export and import them, and read the record inside an image."""
