"""Container images: the record inside one, what is judged by it, archives, registries, and the commands about them."""
