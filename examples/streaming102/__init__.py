"""The running example of *Streaming 102*: ten scores of one team, and its figures."""
