"""Millpond: a storage-centric transactional state engine for streams, on Delta Lake.

Every public name is an attribute of this package. Names that are not listed in ``__init__.pyi`` are internal and
may change between releases.

Example::

    import millpond as mp

    class Counter(mp.Computation):
        def process_record(self, context, record):
            context.state.set((context.state.get() or 0) + 1)

``__init__.pyi`` is the only list of public names. Type checkers and editors read it as a stub. At run time
``lazy_loader`` derives ``__all__`` and the home of each name from the same file and imports a home when one of
its names is first used, so ``import millpond`` stays cheap in a process that needs few of them, a Spark worker
for example. A list in this file would have to be repeated for type checkers, which do not follow a module's
``__getattr__``; NumPy-based projects such as scikit-image keep their public names in this way.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
