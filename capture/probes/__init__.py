"""Probes: weights that score the row of a site, and their files. `headgate.steering.probes` makes them."""
