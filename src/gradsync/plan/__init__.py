"""What to do, as data: a plan, its pace and its guard."""
