"""A cluster and a model's profile in, ranked plans out: what synchronization will cost, and what to do about it."""
