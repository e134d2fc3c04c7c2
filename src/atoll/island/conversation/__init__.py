"""What an island says to its coordinator and does about the answers, once and without any I/O."""
