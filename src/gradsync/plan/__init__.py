"""A plan, its pace and its guard, as data: what to do."""
