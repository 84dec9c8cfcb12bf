"""The step plane ``compiled_graph``: Ray's compiled graph, awaited, guarded, and taken down when nobody needs it.

Ray has two ways to drive such a graph. The one for asyncio keeps a core of the driver busy as
long as the graph exists, takes two thread pools' hops for a step, and hangs for ever after one
cancelled await. The other blocks, but its channels can be used apart: here a step is written to
them on the executor's loop, which takes no longer than a call to the kernel, for there is always
a free buffer; and one thread reads what comes out, only while something is to come.

Nothing is imported here: a worker's process takes no more of it than ``stage``.
"""
