"""Sharded training (ZeRO-3): every rank owns a shard of the model and all meet at every step."""
