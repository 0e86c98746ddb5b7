/* A server with sessions in blocks of a small heap, one of which it uses after it has freed it. */
#define BLOCKS 16

struct session {
    long id;
    long requests;
    long spare[2];
};

static union block {
    union block *next;
    struct session session;
} blocks[BLOCKS], *available;

struct session *last_active;
long served;

static void out(unsigned short port, unsigned char value)
{
    __asm__ volatile("outb %0, %1" : : "a"(value), "Nd"(port));
}

static void print(const char *text)
{
    while (*text)
        out(0x3f8, (unsigned char)*text++);
}

__attribute__((noinline)) void *heap_alloc(void)
{
    union block *block = available;
    if (block)
        available = block->next;
    return block;
}

__attribute__((noinline)) void heap_free(void *memory)
{
    union block *block = memory;
    block->next = available;
    available = block;
}

__attribute__((noinline)) struct session *session_open(long id)
{
    struct session *session = heap_alloc();
    session->id = id;
    session->requests = 0;
    return session;
}

__attribute__((noinline)) void session_serve(struct session *session)
{
    session->requests++;
    last_active = session;
    served++;
}

__attribute__((noinline)) void session_close(struct session *session)
{
    /* The bug: last_active may still point to the session. */
    heap_free(session);
}

__attribute__((noinline)) void log_activity(void)
{
    last_active->spare[0] = served;
}

int main(void)
{
    for (int n = 0; n < BLOCKS; n++)
        heap_free(&blocks[n]);
    for (long id = 1; id <= 20; id++) {
        struct session *session = session_open(id);
        for (long request = 0; request < id % 4; request++)
            session_serve(session);
        if (id != 18)
            log_activity();
        session_close(session);
        if (id == 18)
            log_activity();
    }
    print("served\n");
    out(0xf4, 0);
    return 0;
}
