"""Spark from the other side: code written for its stateful operators, and runs inside queries of your own."""

from millpond.executor.replay.replay import replay_on_spark as replay_on_spark
from millpond.executor.run.options import SparkRunnerOptions as SparkRunnerOptions
from millpond.executor.spark.foreach_batch import ForeachBatch as ForeachBatch
from millpond.executor.spark.foreach_batch import ForeachBatchOptions as ForeachBatchOptions
from millpond.executor.spark.foreach_batch import PipelineBatchOptions as PipelineBatchOptions
from millpond.executor.spark_compat.group_state import ApplyInArrowWithState as ApplyInArrowWithState
from millpond.executor.spark_compat.group_state import ApplyInPandasWithState as ApplyInPandasWithState
from millpond.executor.spark_compat.group_state import ArrowFunction as ArrowFunction
from millpond.executor.spark_compat.group_state import DropDuplicates as DropDuplicates
from millpond.executor.spark_compat.group_state import PandasFunction as PandasFunction
from millpond.executor.spark_compat.import_checkpoint import ImportedCheckpoint as ImportedCheckpoint
from millpond.executor.spark_compat.spark_query import apply_in_arrow_with_state as apply_in_arrow_with_state
from millpond.executor.spark_compat.spark_query import (
    apply_in_pandas_with_state as apply_in_pandas_with_state,
)
from millpond.executor.spark_compat.spark_query import drop_duplicates as drop_duplicates
from millpond.executor.spark_compat.transform_with_state import RowsAs as RowsAs
from millpond.executor.spark_compat.transform_with_state import TransformWithState as TransformWithState
