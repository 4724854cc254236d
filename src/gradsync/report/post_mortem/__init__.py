"""The search for what happened first in a run that went wrong, and to whom."""
