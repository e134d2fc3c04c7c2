"""Messages between ranks over gRPC: any network, mutual trust, streams that are dialled again."""
