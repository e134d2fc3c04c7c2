"""The models a manifest can name, and their initial weights."""
