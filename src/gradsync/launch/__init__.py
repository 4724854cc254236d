"""How ranks come to be one group: under a launcher, or started here."""
