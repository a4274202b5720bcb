"""What the processes of one job tell each other: figures that count for all, and meetings."""
