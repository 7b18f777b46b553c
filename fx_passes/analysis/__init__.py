"""What a graph computes, moves and takes, without changing it: shapes, cost, profile, drawing."""
