"""A user's model under every strategy beside the plain one: what is run, recorded, compared, and said."""
