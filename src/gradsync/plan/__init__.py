"""What to do, as data: a plan, its pace, its guard, and the cluster it is for."""
