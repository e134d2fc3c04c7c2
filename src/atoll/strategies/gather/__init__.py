"""Strategy by pull: contributions lie in buckets, versions are made of contributions."""
