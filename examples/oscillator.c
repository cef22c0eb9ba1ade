/* A solver in C for oscillator.py: a chain of masses on springs, in parts on all ranks, pushed at the free end.

       mpicc -O2 -o oscillator examples/oscillator.c

   Rank 0 reads a line for each step, "reset POSITION" or "step FORCE", and prints a line: the position and the
   speed of the last mass. */

#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MASSES = 16, SUBSTEPS = 20 };

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    int rank, size;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    int first = MASSES * rank / size, count = MASSES * (rank + 1) / size - first;
    double x[MASSES + 2] = {0}, v[MASSES + 2] = {0}; /* x[1] is the first mass of this rank */
    int left = rank > 0 ? rank - 1 : MPI_PROC_NULL, right = rank < size - 1 ? rank + 1 : MPI_PROC_NULL;
    char line[256];

    for (;;) {
        int more = 1;
        if (rank == 0) more = fgets(line, sizeof line, stdin) != NULL;
        MPI_Bcast(&more, 1, MPI_INT, 0, MPI_COMM_WORLD);
        if (!more) break; /* the environment was closed */
        MPI_Bcast(line, sizeof line, MPI_CHAR, 0, MPI_COMM_WORLD);

        char what[16] = "";
        double number = 0;
        sscanf(line, "%15s %lf", what, &number);
        if (strcmp(what, "reset") == 0) {
            for (int i = 0; i <= MASSES + 1; i++) x[i] = v[i] = 0;
            for (int i = 1; i <= count; i++) x[i] = number;
        } else {
            for (int t = 0; t < SUBSTEPS; t++) {
                x[0] = 0, x[count + 1] = x[count]; /* a wall at the left end, nothing at the right one */
                MPI_Sendrecv(&x[1], 1, MPI_DOUBLE, left, 0, &x[count + 1], 1, MPI_DOUBLE, right, 0,
                             MPI_COMM_WORLD, MPI_STATUS_IGNORE);
                MPI_Sendrecv(&x[count], 1, MPI_DOUBLE, right, 1, &x[0], 1, MPI_DOUBLE, left, 1,
                             MPI_COMM_WORLD, MPI_STATUS_IGNORE);
                for (int i = 1; i <= count; i++) {
                    double force = first + i == MASSES ? number : 0;
                    v[i] += 0.05 * (x[i - 1] - 2 * x[i] + x[i + 1] + force - 0.005 * v[i]);
                }
                for (int i = 1; i <= count; i++) x[i] += 0.05 * v[i];
            }
        }
        double last[2] = {x[count], v[count]};
        if (rank == size - 1 && size > 1) MPI_Send(last, 2, MPI_DOUBLE, 0, 2, MPI_COMM_WORLD);
        if (rank == 0 && size > 1) MPI_Recv(last, 2, MPI_DOUBLE, size - 1, 2, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        if (rank == 0) {
            printf("%.17g %.17g\n", last[0], last[1]);
            fflush(stdout); /* else the line stays here */
        }
    }
    MPI_Finalize();
    return 0;
}
