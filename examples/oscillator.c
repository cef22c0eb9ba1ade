/* A solver in C for oscillator.py: a chain of masses on springs, in parts on all ranks, pushed at the free end.

       mpicc -O2 -o oscillator examples/oscillator.c

   A request is "reset POSITION" or "step FORCE". The answer is the position and the speed of the last mass. Rank 0
   gets requests from its standard input, one in a line; or in a job of several programs as messages of two numbers,
   1 for a reset, 2 for a step and 0 for the end. */

#include <mpi.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { MASSES = 16, SUBSTEPS = 20 };
enum { END, RESET, STEP };

static void read_request(double request[2]) {
    char line[256], what[16] = "";
    request[0] = END;
    if (fgets(line, sizeof line, stdin) && sscanf(line, "%15s %lf", what, &request[1]) == 2)
        request[0] = strcmp(what, "reset") ? STEP : RESET;
}

/* Sleep until it is complete: a rank that waits in MPI_Bcast or MPI_Recv takes a core meanwhile. */
static void wait_for(MPI_Request *some, MPI_Status *status) {
    for (int done = 0; MPI_Test(some, &done, status), !done;) usleep(50);
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    int rank, size, found, *program;
    MPI_Comm ranks, firsts; /* of this program; rank 0 of each program, after the ranks of rank0rl */
    MPI_Status from;
    MPI_Request some;
    MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_APPNUM, &program, &found);
    int coupled = found && *program > 0;
    if (coupled) signal(SIGINT, SIG_IGN); /* Ctrl-C is for the ranks of rank0rl, which save the run first */
    MPI_Comm_split(MPI_COMM_WORLD, coupled ? *program : 0, 0, &ranks);
    MPI_Comm_rank(ranks, &rank);
    MPI_Comm_size(ranks, &size);
    MPI_Comm_split(MPI_COMM_WORLD, rank == 0 ? 0 : MPI_UNDEFINED, 0, &firsts);

    int first = MASSES * rank / size, count = MASSES * (rank + 1) / size - first;
    double x[MASSES + 2] = {0}, v[MASSES + 2] = {0}; /* x[1] is the first mass of this rank */
    int left = rank > 0 ? rank - 1 : MPI_PROC_NULL, right = rank < size - 1 ? rank + 1 : MPI_PROC_NULL;

    for (;;) {
        double request[2];
        if (rank == 0 && coupled) {
            MPI_Irecv(request, 2, MPI_DOUBLE, MPI_ANY_SOURCE, 0, firsts, &some);
            wait_for(&some, &from);
        }
        if (rank == 0 && !coupled) read_request(request);
        MPI_Ibcast(request, 2, MPI_DOUBLE, 0, ranks, &some);
        wait_for(&some, MPI_STATUS_IGNORE);
        if (request[0] == END) break; /* the environment was closed */

        if (request[0] == RESET) {
            for (int i = 0; i <= MASSES + 1; i++) x[i] = v[i] = 0;
            for (int i = 1; i <= count; i++) x[i] = request[1];
        } else {
            for (int t = 0; t < SUBSTEPS; t++) {
                x[0] = 0, x[count + 1] = x[count]; /* a wall at the left end, nothing at the right one */
                MPI_Sendrecv(&x[1], 1, MPI_DOUBLE, left, 0, &x[count + 1], 1, MPI_DOUBLE, right, 0, ranks,
                             MPI_STATUS_IGNORE);
                MPI_Sendrecv(&x[count], 1, MPI_DOUBLE, right, 1, &x[0], 1, MPI_DOUBLE, left, 1, ranks,
                             MPI_STATUS_IGNORE);
                for (int i = 1; i <= count; i++) {
                    double force = first + i == MASSES ? request[1] : 0;
                    v[i] += 0.05 * (x[i - 1] - 2 * x[i] + x[i + 1] + force - 0.005 * v[i]);
                }
                for (int i = 1; i <= count; i++) x[i] += 0.05 * v[i];
            }
        }
        double last[2] = {x[count], v[count]};
        if (rank == size - 1 && size > 1) MPI_Send(last, 2, MPI_DOUBLE, 0, 2, ranks);
        if (rank == 0 && size > 1) MPI_Recv(last, 2, MPI_DOUBLE, size - 1, 2, ranks, MPI_STATUS_IGNORE);
        if (rank == 0 && coupled) MPI_Send(last, 2, MPI_DOUBLE, from.MPI_SOURCE, 0, firsts);
        if (rank == 0 && !coupled) {
            printf("%.17g %.17g\n", last[0], last[1]);
            fflush(stdout); /* else the line stays here */
        }
    }
    MPI_Finalize();
    return 0;
}
