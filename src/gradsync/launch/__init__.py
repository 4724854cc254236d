"""The making of one group out of ranks: under a launcher, or started here."""
