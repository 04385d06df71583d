"""What a cluster says of itself, for profiles: propose one, and tell what would fail with one.  Submits nothing."""
