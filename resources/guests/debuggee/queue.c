#include "queue.h"

void queue_init(struct queue *queue)
{
    queue->put = 0;
    queue->taken = 0;
    queue->guard = GUARD;
}

int queue_put(struct queue *queue, long job)
{
    if (queue->put - queue->taken > SLOTS)
        return 0;
    /* The bug: the ring has SLOTS slots, not SLOTS + 1. */
    queue->slots[queue->put % (SLOTS + 1)] = job;
    queue->put++;
    return 1;
}

long queue_take(struct queue *queue)
{
    long job = queue->slots[queue->taken % (SLOTS + 1)];
    queue->taken++;
    return job;
}
