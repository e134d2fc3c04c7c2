"""What people see of a run: status, metrics, queues, samples, counts."""
