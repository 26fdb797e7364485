"""How the nodes of a job meet, agree on ranks, and stay together."""
