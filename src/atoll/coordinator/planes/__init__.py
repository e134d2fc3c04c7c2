"""How messages reach the coordinator: HTTP for control, gRPC for frames."""
