"""What `gradsync demo --slow-link` does: joins two networks of this machine by a slow link, and trains over it."""
