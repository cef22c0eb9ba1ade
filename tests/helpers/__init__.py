"""What tests share: environments, agents, ranks, runs, and faults."""
