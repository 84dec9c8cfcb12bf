"""Backend ``external_launcher``: torchrun or SLURM has started one process for each rank.

Nothing is spawned here. Each process has an executor and a worker of its own, and makes the
same calls as all others: :mod:`~aexec.executor.external.peers` sees to it that each of them
gets the replies of all ranks, and that a rank that differs, or ends, is known to all.
"""
