"""Sums flat tensors over the ranks: exactly by the best route, or in a compressor's rounds."""
