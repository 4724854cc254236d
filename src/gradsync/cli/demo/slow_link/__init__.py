"""The demo `gradsync demo --slow-link`: it joins two networks of this machine by a slow link, and trains over it."""
