"""Units: parameters that are gathered together, their copies, and the order in which they are used."""
