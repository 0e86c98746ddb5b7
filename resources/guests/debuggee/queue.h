#ifndef QUEUE_H
#define QUEUE_H

#define SLOTS 8
#define GUARD 0x5ca1ab1eUL

/* A ring of jobs, followed by a guard word that must never be written. */
struct queue {
    unsigned long put;
    unsigned long taken;
    long slots[SLOTS];
    unsigned long guard;
};

void queue_init(struct queue *queue);
int queue_put(struct queue *queue, long job);
long queue_take(struct queue *queue);

#endif
