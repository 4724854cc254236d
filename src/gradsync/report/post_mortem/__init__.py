"""What happened first in a run that went wrong, and to whom."""
