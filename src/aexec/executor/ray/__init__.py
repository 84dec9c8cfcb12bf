"""Backend ``ray``: ranks in processes that Ray placed, anywhere in a cluster; see ``group``.

Nothing is imported here: a worker's process takes no more of it than ``worker_actor``.
"""
