"""How values travel between processes: frames, their headers and their checksums."""
