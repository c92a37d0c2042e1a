"""The plain models: no process group, mesh or rank is named here."""
