/* A stand-in for NVIDIA's libnvidia-ml.so.1: it answers from the file that the
   environment variable RECORDED_MACHINE names, one "key value ..." a line:

     driver VERSION
     cuda NUMBER                      such as 13000 for 13.0
     p2p GPU_INDEX GPU_INDEX STATUS_NVLINK STATUS_READ
     gpu UUID TOTAL_MIB FREE_MIB MAJOR MINOR PERCENT COMPUTE_MODE MIG_MODE NAME
     mig GPU_INDEX UUID
     process GPU_INDEX PID PERCENT MIB
     lost GPU_INDEX
     cuda DEVICES, which torch counts (one a GPU)

   Return values are those of nvml.h: 0 success, 2 invalid argument, 3 not supported,
   6 not found, 7 insufficient size, 9 driver not loaded, 15 GPU is lost. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OK, INVALID = 2, UNSUPPORTED = 3, MISSING = 6, TOO_SMALL = 7, NO_DRIVER = 9, LOST = 15 };
enum { MOST = 64 };

typedef struct {
    char uuid[80], name[96];
    unsigned long long total, freed;
    int major, minor, percent, mode, mig, parent;
} Device;

typedef struct { int gpu; unsigned pid, percent; } Sample;

static Device gpus[MOST], instances[MOST];
static Sample samples[MOST];
static struct { int one, other, nvlink, read; } links[MOST];
static int gpu_count, instance_count, sample_count, link_count, cuda, is_open, lost;
static char driver[80];

int nvmlInit_v2(void) {
    const char *path = getenv("RECORDED_MACHINE");
    FILE *file = path ? fopen(path, "r") : NULL;
    char line[512];
    if (!file) return NO_DRIVER;
    gpu_count = instance_count = sample_count = link_count = cuda = 0;
    lost = -1;
    driver[0] = 0;
    while (fgets(line, sizeof line, file)) {
        Device d = {.parent = -1};
        Sample s;
        if (sscanf(line, "driver %79s", driver) == 1) continue;
        if (sscanf(line, "cuda %d", &cuda) == 1) continue;
        if (sscanf(line, "lost %d", &lost) == 1) continue;
        if (sscanf(line, "p2p %d %d %d %d", &links[link_count].one,
                   &links[link_count].other, &links[link_count].nvlink,
                   &links[link_count].read) == 4) {
            link_count++;
            continue;
        }
        if (sscanf(line, "gpu %79s %llu %llu %d %d %d %d %d %95[^\n]", d.uuid, &d.total,
                   &d.freed, &d.major, &d.minor, &d.percent, &d.mode, &d.mig,
                   d.name) == 9)
            gpus[gpu_count++] = d;
        else if (sscanf(line, "mig %d %79s", &d.parent, d.uuid) == 2)
            instances[instance_count++] = d;
        else if (sscanf(line, "process %d %u %u", &s.gpu, &s.pid, &s.percent) == 3)
            samples[sample_count++] = s;
    }
    fclose(file);
    is_open = driver[0] != 0;
    return is_open ? OK : NO_DRIVER;
}

int nvmlShutdown(void) { is_open = 0; return OK; }

int nvmlSystemGetDriverVersion(char *text, unsigned length) {
    snprintf(text, length, "%s", driver);
    return OK;
}

int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    *version = cuda;
    return cuda ? OK : UNSUPPORTED;
}

int nvmlDeviceGetP2PStatus(Device *one, Device *other, int index, int *status) {
    for (int i = 0; i < link_count; i++)
        if (&gpus[links[i].one] == one && &gpus[links[i].other] == other) {
            *status = index == 2 ? links[i].nvlink : links[i].read;
            return OK;
        }
    return UNSUPPORTED;
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = gpu_count;
    return is_open ? OK : NO_DRIVER;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **device) {
    if (index >= (unsigned)gpu_count) return INVALID;
    if ((int)index == lost) return LOST;
    *device = &gpus[index];
    return OK;
}

int nvmlDeviceGetUUID(Device *device, char *text, unsigned length) {
    snprintf(text, length, "%s", device->uuid);
    return OK;
}

int nvmlDeviceGetName(Device *device, char *text, unsigned length) {
    snprintf(text, length, "%s", device->name);
    return OK;
}

int nvmlDeviceGetMemoryInfo(Device *device, unsigned long long *memory) {
    memory[0] = device->total << 20;
    memory[1] = device->freed << 20;
    memory[2] = memory[0] - memory[1];
    return OK;
}

int nvmlDeviceGetCudaComputeCapability(Device *device, int *major, int *minor) {
    *major = device->major;
    *minor = device->minor;
    return OK;
}

int nvmlDeviceGetComputeMode(Device *device, int *mode) {
    *mode = device->mode;
    return OK;
}

int nvmlDeviceGetMigMode(Device *device, unsigned *current, unsigned *pending) {
    if (device->mig < 0) return UNSUPPORTED;
    *current = *pending = device->mig;
    return OK;
}

int nvmlDeviceGetMaxMigDeviceCount(Device *device, unsigned *count) {
    *count = device->mig < 0 ? 0 : 7;
    return OK;
}

int nvmlDeviceGetMigDeviceHandleByIndex(Device *device, unsigned index, Device **mig) {
    for (int i = 0; i < instance_count; i++)
        if (&gpus[instances[i].parent] == device && index-- == 0) {
            *mig = &instances[i];
            return OK;
        }
    return MISSING;
}

int nvmlDeviceGetUtilizationRates(Device *device, unsigned *used) {
    if (device->mig > 0) return UNSUPPORTED;
    used[0] = device->percent;
    used[1] = 0;
    return OK;
}

/* pid, alignment, time stamp, percent of the multiprocessors, memory, encoder, decoder */
typedef struct { unsigned pid; unsigned long long at; unsigned sm, mem, enc, dec; } Use;

int nvmlDeviceGetProcessUtilization(Device *device, Use *used, unsigned *room,
                                    unsigned long long since) {
    unsigned found = 0;
    (void)since;
    if (device->mig > 0) return UNSUPPORTED;
    for (int i = 0; i < sample_count; i++)
        if (&gpus[samples[i].gpu] == device) {
            if (used && found < *room)
                used[found] = (Use){.pid = samples[i].pid, .sm = samples[i].percent};
            found++;
        }
    if (!found) return MISSING;
    if (!used || *room < found) {
        *room = found;
        return TOO_SMALL;
    }
    *room = found;
    return OK;
}
