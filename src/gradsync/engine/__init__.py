"""A gradient is ready: which bucket, is it full, launch, wait. The only place that touches autograd."""
