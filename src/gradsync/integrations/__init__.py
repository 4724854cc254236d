"""Gradsync inside what others have written: DDP, Lightning, Fabric, Accelerate, Transformers and Ray."""
