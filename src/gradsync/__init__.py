"""gradsync keeps the replicas of a data-parallel PyTorch training run in step."""
