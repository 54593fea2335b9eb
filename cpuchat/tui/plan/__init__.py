"""Plans: the catalog on a machine that need not be here."""
