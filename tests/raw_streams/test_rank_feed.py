import sys
from threading import Thread

import numpy as np

from batchloom import PlanError, PlanSpec
from batchloom.streaming import FeedSettings, RankFeed
from batchloom.streaming.lane import LanePosition, StreamPool

STEPS = 1500


class OneSequence:
    """Every pool is one document that fills a sequence; each second one has none."""

    def ask(self, lane, place):
        pass

    def take(self, lane, place):
        lengths = np.array([4] if place.pool % 2 else [], np.uint32)
        following = LanePosition(0, place.pool + 1)
        tokens = np.zeros(int(lengths.sum()), np.uint8)
        return StreamPool(lane, 0, place.pool, tokens, lengths, None, following)

    def close(self):
        pass


def test_cursors_and_tokens_are_asked_while_another_thread_takes_steps():
    spec = PlanSpec(seq_len=4, global_batch_size=1, steps=STEPS)
    share = FeedSettings(spec, lanes=1, rank=0, world_size=1, end_id=0, max_bad=0)
    feed, taken, wrong = RankFeed(share, OneSequence(), {0: (LanePosition(), 0)}), [], []

    def take():
        for step in range(STEPS):
            feed.take(step)
            feed.done(step)
            taken.append(step)

    producer = Thread(target=take)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        producer.start()
        while producer.is_alive():
            step = taken[-1] if taken else 0
            try:
                found = feed.cursors(step)
            except (IndexError, PlanError) as error:
                wrong.append(error)
                break
            if found[0][1] != step:
                wrong.append((step, found))
                break
    finally:
        producer.join()
        sys.setswitchinterval(interval)
    assert not wrong
    assert len(taken) == STEPS
    assert feed.tokens(STEPS - 1) == 4
