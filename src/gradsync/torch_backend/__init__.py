"""gradsync as a backend of torch.distributed; users import `gradsync.backend`."""
