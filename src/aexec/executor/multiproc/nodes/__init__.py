"""Backend `mp` on several nodes: the leader has an executor, each other node an agent."""
