/* Prints what it reads on COM1, up to a q. */
static void out(unsigned short port, unsigned char value)
{
    __asm__ volatile("outb %0, %1" : : "a"(value), "Nd"(port));
}

static unsigned char in(unsigned short port)
{
    unsigned char value;
    __asm__ volatile("inb %1, %0" : "=a"(value) : "Nd"(port));
    return value;
}

int main(void)
{
    for (;;) {
        while (!(in(0x3fd) & 1))
            ;
        unsigned char byte = in(0x3f8);
        out(0x3f8, byte);
        if (byte == 'q')
            out(0xf4, 7);
    }
}
