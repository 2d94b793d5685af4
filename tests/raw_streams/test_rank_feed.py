import sys
from threading import Thread

import numpy as np

from batchloom import PlanError, PlanSpec
from batchloom.core.loss_weights import LossFlags
from batchloom.streaming import FeedSettings, RankFeed
from batchloom.streaming.lane import LanePosition, StreamPool

STEPS = 500


class OneSequenceReader:
    """Returns pools of one full document, and every second pool empty."""

    def ask(self, lane, position):
        pass

    def take(self, lane, position):
        lengths = np.array([4] if position.pool % 2 else [], np.uint32)
        following = LanePosition(0, position.pool + 1)
        tokens = np.zeros(int(lengths.sum()), np.uint8)
        return StreamPool(lane, 0, position.pool, tokens, lengths, LossFlags.all_trained(tokens.size), following)

    def close(self):
        pass


def test_cursors_and_tokens_are_read_while_another_thread_takes_steps():
    spec = PlanSpec(seq_len=4, global_batch_size=1, steps=STEPS)
    settings = FeedSettings(spec, lanes=1, rank=0, world_size=1, end_id=0, max_bad=0)
    feed, steps_taken, errors = RankFeed(settings, OneSequenceReader(), {0: (LanePosition(), 0)}), [], []

    def take():
        for step in range(STEPS):
            feed.take(step)
            feed.done(step)
            steps_taken.append(step)

    producer = Thread(target=take)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        producer.start()
        while producer.is_alive():
            step = steps_taken[-1] if steps_taken else 0
            try:
                cursors = feed.cursors(step)
            except (IndexError, PlanError) as error:
                errors.append(error)
                break
            if cursors[0][1] != step:
                errors.append((step, cursors))
                break
    finally:
        producer.join()
        sys.setswitchinterval(interval)
    assert not errors
    assert len(steps_taken) == STEPS
    assert feed.tokens(STEPS - 1) == 4
