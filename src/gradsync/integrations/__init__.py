"""gradsync inside what others have written: `DistributedDataParallel` here."""
